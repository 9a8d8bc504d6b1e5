import type { ReactNode } from "react";

/** A titled surface; `note` stands at the right of the title. */
export function Panel(props: {
  title: string;
  note?: ReactNode;
  className?: string;
  children: ReactNode;
}) {
  return (
    <section className={`panel ${props.className ?? ""}`} aria-label={props.title}>
      <header>
        <h2>{props.title}</h2>
        {props.note !== undefined && <div className="note">{props.note}</div>}
      </header>
      {props.children}
    </section>
  );
}
