import { chainOf, type GraphData } from "./GraphData";

const [DIM, USUAL, LIT] = [0, 1, 2];

/** How strongly each node is drawn: the chain of what is selected, else what is searched for. */
export function emphasisOf(data: GraphData, selected: number, search: string): Uint8Array {
  const emphasis = new Uint8Array(data.size);
  if (selected >= 0) {
    emphasis.fill(DIM);
    for (const node of chainOf(data, selected)) emphasis[node] = LIT;
    for (const node of below(data, selected)) emphasis[node] = USUAL;
    emphasis[selected] = LIT;
    return emphasis;
  }
  if (search === "") return emphasis.fill(USUAL);
  for (const node of found(data, search)) emphasis[node] = USUAL;
  return emphasis;
}

/** Nodes whose session, tenant, layer, name or key has `search` in it. */
export function found(data: GraphData, search: string): number[] {
  const wanted = search.trim().toLowerCase();
  const places = (names: readonly string[]) =>
    new Set(names.flatMap((name, place) => (name.toLowerCase().includes(wanted) ? [place] : [])));
  const [sessions, tenants] = [places(data.names.sessions), places(data.names.tenants)];
  const segments = places(data.names.segments);
  const layers = places(data.names.layers.map((name) => `${name} ${name.replaceAll("_", " ")}`));
  const hits: number[] = [];
  for (let node = 0; node < data.size; node++) {
    const is =
      sessions.has(data.session[node]!) ||
      tenants.has(data.tenant[node]!) ||
      layers.has(data.layer[node]!) ||
      segments.has(data.segment[node]!) ||
      data.key[node]!.toLowerCase().includes(wanted);
    if (is) hits.push(node);
  }
  return hits;
}

/** Blocks that follow a block in some chain. */
function below(data: GraphData, node: number): number[] {
  const under = new Uint8Array(data.size);
  under[node] = 1;
  const order = Array.from({ length: data.blocks }, (_, place) => place);
  order.sort((a, b) => data.depth[a]! - data.depth[b]!);
  return order.filter((place) => {
    if (place !== node && data.parent[place]! >= 0) under[place] = under[data.parent[place]!]!;
    return under[place] === 1;
  });
}
