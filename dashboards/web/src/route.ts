import { useSyncExternalStore } from "react";

/** Where the page is: a view and what is looked at in it, as the address after `#` says. */
export interface Route {
  readonly view: string;
  readonly params: URLSearchParams;
}

export function parseRoute(hash: string): Route {
  const [path = "", query = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  return { view: path || "now", params: new URLSearchParams(query) };
}

/** An address to link to; parameters that are null or undefined are left out. */
export function linkTo(
  view: string,
  params: Record<string, string | number | null | undefined> = {},
) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    if (value !== null && value !== undefined && value !== "") query.set(name, String(value));
  }
  const text = query.toString();
  return `#/${view}${text && `?${text}`}`;
}

// Told before `hashchange`, which comes later: a field that shows a parameter must show the letter that
// was typed before the next one is, or React puts the old text back and a letter is lost.
const listeners = new Set<() => void>();

export function go(view: string, params: Record<string, string | number | null | undefined> = {}) {
  window.location.hash = linkTo(view, params);
  for (const listener of listeners) listener();
}

/** The current parameters with some of them changed; null takes one away. */
export function change(changes: Record<string, string | number | null>) {
  const { view, params } = parseRoute(window.location.hash);
  go(view, { ...Object.fromEntries(params), ...changes });
}

function subscribe(listener: () => void) {
  window.addEventListener("hashchange", listener);
  listeners.add(listener);
  return () => {
    window.removeEventListener("hashchange", listener);
    listeners.delete(listener);
  };
}

export function useRoute(): Route {
  return parseRoute(useSyncExternalStore(subscribe, () => window.location.hash));
}
