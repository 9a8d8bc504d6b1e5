import type { RequestView } from "../../api/types";

/** Where blocks of a prompt came from, as bars show it from left to right. */
const PARTS = [
  { label: "pool", name: "pool", color: "pool" },
  { label: "prefetched", name: "prefetched", color: "prefetched" },
  { label: "loaded", name: "loaded", color: "loaded" },
  { label: "spliced", name: "spliced", color: "spliced" },
  { label: "computed", name: "computed", color: "computed" },
] as const;

/** Those that any request has: what no engine feeds is not shown. */
export function partsOf(requests: readonly RequestView[]) {
  return PARTS.filter(({ name }) => requests.some(({ blocks }) => blocks[name] > 0));
}

export function slicesOf({ blocks }: RequestView) {
  return PARTS.map(({ label, name, color }) => ({ label, color, value: blocks[name] }));
}
