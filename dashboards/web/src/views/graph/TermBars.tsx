import { signed, words } from "../../format";

/** What each term adds to a score: to the right it sends the block away, to the left it keeps it. */
export function TermBars({ terms }: { terms: Record<string, number> }) {
  const most = Math.max(1e-9, ...Object.values(terms).map(Math.abs));
  return (
    <dl className="terms">
      {Object.entries(terms).map(([name, value]) => (
        <div key={name}>
          <dt>{words(name)}</dt>
          <dd className="track">
            <i
              style={{
                width: `${(50 * Math.abs(value)) / most}%`,
                [value < 0 ? "right" : "left"]: "50%",
                background: value < 0 ? "var(--good)" : "var(--warn)",
              }}
            />
          </dd>
          <dd className="number">{signed(value)}</dd>
        </div>
      ))}
    </dl>
  );
}
