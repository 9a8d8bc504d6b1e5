export function SessionsView() {
  return null;
}
