import { words } from "../format";

/** A source layer by its colour and its name. */
export function LayerKey(props: { of: string; className?: string }) {
  return (
    <span className={`key ${props.className ?? ""}`}>
      <i style={{ background: `var(--${props.of})` }} />
      {words(props.of)}
    </span>
  );
}
