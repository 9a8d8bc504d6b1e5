import { Fragment, type ReactNode } from "react";

/** Names and what is known under them; what is null is left out. */
export function Facts(props: { of: Record<string, ReactNode> }) {
  return (
    <dl className="facts">
      {Object.entries(props.of).map(
        ([name, value]) =>
          value != null && (
            <Fragment key={name}>
              <dt>{name}</dt>
              <dd>{value}</dd>
            </Fragment>
          ),
      )}
    </dl>
  );
}
