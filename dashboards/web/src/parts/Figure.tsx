import type { ReactNode } from "react";

/** One number that matters, what it is, and what it is beside. */
export function Figure(props: {
  label: string;
  value: ReactNode;
  note?: ReactNode;
  tone?: string;
}) {
  return (
    <div className="figure">
      <dt>{props.label}</dt>
      <dd style={props.tone === undefined ? undefined : { color: `var(--${props.tone})` }}>
        {props.value}
      </dd>
      {props.note !== undefined && <dd className="note">{props.note}</dd>}
    </div>
  );
}
