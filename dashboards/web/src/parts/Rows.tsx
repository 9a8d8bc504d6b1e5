import type { ReactNode } from "react";

/** What a column holds; numbers stand at the right, and what is `wide` is not there on a phone. */
export interface Column {
  readonly name: string;
  readonly className: string;
}

export function right(name: string): Column {
  return { name, className: "right" };
}

/** A table with a name a column: a text for one of words, `right` for one of numbers. */
export function Rows(props: { columns: readonly (string | Column)[]; children: ReactNode }) {
  return (
    <table className="rows">
      <thead>
        <tr>
          {props.columns.map((column) =>
            typeof column === "string" ? (
              <th key={column}>{column}</th>
            ) : (
              <th key={column.name} className={column.className}>
                {column.name}
              </th>
            ),
          )}
        </tr>
      </thead>
      <tbody>{props.children}</tbody>
    </table>
  );
}

/** What scrolls on its own, with the keyboard too; `label` says what it is. */
export function Scroll(props: { label: string; className?: string; children: ReactNode }) {
  return (
    <div
      className={`scroll ${props.className ?? ""}`}
      tabIndex={0}
      role="region"
      aria-label={props.label}
    >
      {props.children}
    </div>
  );
}
