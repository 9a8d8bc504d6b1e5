import { shortKey } from "../format";
import { linkTo } from "../route";

/** A block by its key; leads to it in the graph. */
export function BlockLink(props: { of: string }) {
  return (
    <a className="mono" href={linkTo("graph", { block: props.of })} title={props.of}>
      {shortKey(props.of)}
    </a>
  );
}

/** A session by its name; leads to its timeline. */
export function SessionLink(props: { of: string; tenant?: string | null }) {
  return (
    <a className="wrap" href={linkTo("sessions", { session: props.of, tenant: props.tenant })}>
      {props.of}
    </a>
  );
}
