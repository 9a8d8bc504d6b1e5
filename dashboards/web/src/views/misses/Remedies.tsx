import type { Remedy } from "../../api/types";
import { duration } from "../../format";
import { linkTo } from "../../route";

interface Props {
  readonly of: readonly Remedy[];
  /** Seconds of the whole request; null while it runs. */
  readonly all: number | null;
  readonly engine: string;
}

/** What would have made a request faster, what saves most first. */
export function Remedies({ of, all, engine }: Props) {
  if (of.length === 0) return null;
  return (
    <div className="remedies">
      <p className="sentence">
        <b>What would have made it faster:</b>
      </p>
      <ul>
        {of.map((each) => (
          <li key={each.of} className="sentence remedy wrap">
            <Worth remedy={each} all={all} /> <Said text={each.text} engine={engine} />
          </li>
        ))}
      </ul>
    </div>
  );
}

/** Of which part of its time, and how much of that at most. */
function Worth({ remedy, all }: { remedy: Remedy; all: number | null }) {
  if (!remedy.saves_s) return remedy.of === "wait" ? <b>Its wait:</b> : null;
  const whole = all === null ? "" : ` of ${duration(all)}`;
  return (
    <b>
      Up to {duration(remedy.saves_s)}
      {whole}, {WHERE[remedy.of]}:
    </b>
  );
}

const WHERE = { wait: "of its wait", prompt: "of its prompt", answer: "of its answer" };
const WHAT_IF = "What if";

/** A sentence of the sidecar's: what stands between backticks as code, What if as a link. */
function Said({ text, engine }: { text: string; engine: string }) {
  return text
    .split("`")
    .map((part, at) => (at % 2 ? <code key={at}>{part}</code> : linked(part, at, engine)));
}

function linked(text: string, at: number, engine: string) {
  const [before, after] = text.split(WHAT_IF, 2);
  if (after === undefined) return text;
  return (
    <span key={at}>
      {before}
      <a href={linkTo("whatif", { engine })}>{WHAT_IF}</a>
      {after}
    </span>
  );
}
