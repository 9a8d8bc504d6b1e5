import { duration, words } from "../../format";
import { COLD, type GraphData, MEMORY, POOL, SHARED, SUPERSEDED, WARM } from "./GraphData";

/** Whose a node is, as text. */
export function sessionOf(data: GraphData, node: number): string | null {
  return data.names.sessions[data.session[node]!] ?? null;
}

export function layerOf(data: GraphData, node: number): string {
  return data.names.layers[data.layer[node]!] ?? "memory";
}

/** Where the bytes of a block are, as a phrase. */
export function whereIs(data: GraphData, node: number): string {
  const tiers = data.tiers[node]!;
  const places = [
    ...(tiers & POOL ? ["pool"] : []),
    ...(tiers & WARM ? ["warm"] : []),
    ...(tiers & COLD ? ["cold"] : []),
  ];
  return places.length > 0 ? `in ${places.join(" and ")}` : "in no pool or tier, only remembered";
}

/** What a node is, in a few short lines. */
export function describe(data: GraphData, node: number): string[] {
  if (data.layer[node] === MEMORY) return [`memory ${data.key[node]}`];
  const session = sessionOf(data, node);
  const name = data.names.segments[data.segment[node]!];
  const flags = data.flags[node]!;
  return [
    `${words(layerOf(data, node))}, block ${data.depth[node]! + 1}${session === null ? "" : ` of ${session}`}`,
    whereIs(data, node),
    `found by ${data.hits[node]} requests, last used ${duration(data.idle[node])} ago`,
    ...(name === undefined ? [] : [`named ${name}`]),
    ...(flags & SHARED ? ["shared by several sessions"] : []),
    ...(flags & SUPERSEDED ? ["superseded: only an abandoned branch used it"] : []),
  ];
}
