import { useResource } from "../api/resource";
import type { Caches, Sampled, Shadows } from "../api/types";
import { isFed } from "../views/sampled/SampledView";
import { VIEWS, type View } from "./views";

const RARELY_MS = 30_000;

/** The views that have something to show: what no engine feeds is left out. */
export function useShownViews(): readonly View[] {
  const { data: shadows } = useResource<Shadows>("v1/shadows", RARELY_MS);
  const { data: sampled } = useResource<Sampled>("v1/sampled?limit=1", RARELY_MS);
  const { data: caches } = useResource<Caches>("v1/caches?steps=1", RARELY_MS);
  const away = new Set<string>();
  if (shadows !== undefined && shadows.shadows.length === 0) away.add("whatif");
  if (sampled !== undefined && !isFed(sampled)) away.add("sampled");
  if (caches !== undefined && caches.runs.length === 0) away.add("caches");
  return VIEWS.filter((view) => !away.has(view.id));
}
