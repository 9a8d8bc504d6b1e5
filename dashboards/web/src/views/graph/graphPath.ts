export const MOST_NODES = 200_000; // the API gives no more
const NODES = 20_000; // asked for unless the address says otherwise

/** Where the graph is asked for, by the parameters of the page's address. */
export function graphPath(params: URLSearchParams): string {
  return `v1/graph?limit=${Number(params.get("limit")) || NODES}`;
}
