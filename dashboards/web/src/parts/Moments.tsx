import type { Moment } from "../api/types";
import { clock, words } from "../format";
import { linkTo } from "../route";

const COLORS: Record<string, string> = {
  turn: "accent",
  pause: "dim",
  eviction: "bad",
  regret: "bad",
  load: "loaded",
  prefetch: "prefetched",
  miss: "warn",
};

/** What happened, the newest first, each with a way to the log that it stands in. */
export function Moments({ moments }: { moments: readonly Moment[] }) {
  if (moments.length === 0) return <p className="dim">Nothing that the logs still remember.</p>;
  return (
    <ol className="moments">
      {moments.map((moment, place) => (
        <li key={place} style={{ ["--mark" as string]: `var(--${COLORS[moment.what] ?? "dim"})` }}>
          <time>{clock(moment.at)}</time>
          <div>
            <b>{words(moment.what)}</b> <span className="wrap">{moment.sentence}</span>{" "}
            {moment.request !== null && (
              <a href={linkTo("misses", { request: moment.request })}>request</a>
            )}{" "}
            {moment.eviction !== null && (
              <a
                href={linkTo("evictions", {
                  tab: "log",
                  engine: moment.engine,
                  eviction: moment.eviction,
                })}
              >
                eviction
              </a>
            )}
          </div>
        </li>
      ))}
    </ol>
  );
}
