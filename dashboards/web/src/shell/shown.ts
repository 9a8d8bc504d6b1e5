import { useResource } from "../api/resource";
import type { Shadows } from "../api/types";
import { VIEWS, type View } from "./views";

const RARELY_MS = 30_000;

/** The views that have something to show: what no engine feeds is left out. */
export function useShownViews(): readonly View[] {
  const { data: shadows } = useResource<Shadows>("v1/shadows", RARELY_MS);
  const away = new Set<string>();
  if (shadows !== undefined && shadows.shadows.length === 0) away.add("whatif");
  return VIEWS.filter((view) => !away.has(view.id));
}
