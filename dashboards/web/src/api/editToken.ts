const KEPT_AS = "kvgraph-edit";
const IN_ADDRESS = /^#edit=([\w-]+)(?:&(\w+))?$/;

/**
 * Takes the token that allows changes out of the address that `kvgraph open --edit` gives, before
 * anything else reads it, and goes to the view behind it, or to what can be changed. The token is
 * kept for this tab alone.
 */
export function takeEditToken() {
  const found = IN_ADDRESS.exec(window.location.hash);
  if (found?.[1] === undefined) return;
  window.sessionStorage.setItem(KEPT_AS, found[1]);
  window.history.replaceState(null, "", `#/${found[2] ?? "weights"}`);
}

export function editToken(): string | null {
  return window.sessionStorage.getItem(KEPT_AS);
}
