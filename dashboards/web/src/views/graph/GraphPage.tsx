export function GraphPage() {
  return null;
}
