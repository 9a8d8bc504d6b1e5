import type { ShadowView } from "../../api/types";
import { percent, points, whole } from "../../format";
import { Bar } from "../../parts/Bar";
import { right, Rows, Scroll } from "../../parts/Rows";
import { CEILING, colorsOf, OURS } from "./looks";

/** Every shadow in words and numbers, those that find most first. */
export function ShadowTable({ shadows }: { shadows: readonly ShadowView[] }) {
  const colors = colorsOf(shadows);
  const live = shadows.find(({ name }) => name === OURS)?.hit_rate ?? null;
  const sorted = [...shadows].sort((a, b) => (b.hit_rate ?? -1) - (a.hit_rate ?? -1));
  return (
    <Scroll label="Every shadow">
      <Rows
        columns={[
          "shadow",
          { name: "blocks", className: "right wide" },
          { name: "found", className: "found wide" },
          right("share"),
          right("beside ours"),
        ]}
      >
        {sorted.map((each) => (
          <Row key={each.name} shadow={each} colors={colors} live={live} />
        ))}
      </Rows>
    </Scroll>
  );
}

interface RowProps {
  readonly shadow: ShadowView;
  readonly colors: ReadonlyMap<string, string>;
  readonly live: number | null;
}

function Row({ shadow, colors, live }: RowProps) {
  const { name, asked, hit_rate } = shadow;
  const found = Math.round(asked * (hit_rate ?? 0)); // where a sample is followed: as of all
  const color = (name === CEILING ? "warn" : colors.get(shadow.policy)) ?? "dim";
  return (
    <tr aria-selected={name === OURS}>
      <td>
        <b>{name}</b> <span className="dim wrap">{shadow.sentence}</span>
      </td>
      <td className="right wide">{whole(shadow.blocks)}</td>
      <td className="wide">
        <Bar label={name} slices={[{ label: "found", value: found, color }]} room={asked - found} />
      </td>
      <td className="right">{percent(hit_rate, 1, 1)}</td>
      <td className="right">
        {beside(shadow)}
        {isOfLess(shadow, live) && (
          <div className="dim">where ours found {percent(shadow.ours, 1, 1)}</div>
        )}
      </td>
    </tr>
  );
}

/** Whether a shadow has followed other requests than the live engine: it began later, or looks at
 * those that are remembered. */
function isOfLess({ ours }: ShadowView, live: number | null): boolean {
  return ours !== null && live !== null && Math.abs(ours - live) > 0.0005;
}

/** Beside what the live engine found of the same requests. */
function beside({ name, hit_rate, ours }: ShadowView): string {
  if (name === OURS || hit_rate === null || ours === null) return "";
  return points(hit_rate - ours);
}
