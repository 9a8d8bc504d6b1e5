import { useResource } from "./resource";
import type { Engines } from "./types";

const RARELY_MS = 15_000;

/** What people call an engine, by its id; the id where nobody says. */
export function useEngineNames(): (id: string) => string {
  const { data } = useResource<Engines>("v1/engines", RARELY_MS);
  const names = new Map(data?.engines.map(({ id, name }) => [id, name]));
  return (id) => names.get(id) ?? id;
}
