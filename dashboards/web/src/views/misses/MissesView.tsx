export function MissesView() {
  return null;
}
