import type { ReactNode } from "react";

export interface Entry {
  readonly label: string;
  readonly color: string;
  readonly value?: ReactNode;
}

/** What colours mean; `color` is the name of one of the page's colours. */
export function Legend(props: { entries: readonly Entry[] }) {
  return (
    <ul className="legend">
      {props.entries.map((entry) => (
        <li key={entry.label}>
          <span className="swatch" style={{ background: `var(--${entry.color})` }} />
          {entry.label}
          {entry.value !== undefined && <b>{entry.value}</b>}
        </li>
      ))}
    </ul>
  );
}
