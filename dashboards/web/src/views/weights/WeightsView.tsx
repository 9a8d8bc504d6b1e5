export function WeightsView() {
  return null;
}
