export function EvictionsView() {
  return null;
}
