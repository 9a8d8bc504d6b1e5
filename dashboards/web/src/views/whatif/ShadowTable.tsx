import type { ShadowView } from "../../api/types";
import { percent, points, whole } from "../../format";
import { Bar } from "../../parts/Bar";
import { right, Rows, Scroll } from "../../parts/Rows";
import { CEILING, colorsOf, OURS } from "./looks";

/** Every shadow in words and numbers, those that find most first. */
export function ShadowTable({ shadows }: { shadows: readonly ShadowView[] }) {
  const ours = shadows.find(({ name }) => name === OURS)?.hit_rate ?? null;
  const colors = colorsOf(shadows);
  const sorted = [...shadows].sort((a, b) => (b.hit_rate ?? -1) - (a.hit_rate ?? -1));
  return (
    <Scroll label="Every shadow">
      <Rows
        columns={[
          "shadow",
          right("blocks"),
          { name: "found", className: "found" },
          right("share"),
          right("beside ours"),
        ]}
      >
        {sorted.map((each) => (
          <tr key={each.name} aria-selected={each.name === OURS}>
            <td>
              <b>{each.name}</b> <span className="dim wrap">{each.sentence}</span>
            </td>
            <td className="right">{whole(each.blocks)}</td>
            <td>
              <Bar
                label={each.name}
                slices={[
                  {
                    label: "found",
                    value: each.found,
                    color: (each.name === CEILING ? "warn" : colors.get(each.policy)) ?? "dim",
                  },
                ]}
                room={each.asked - each.found}
              />
            </td>
            <td className="right">{percent(each.hit_rate, 1, 1)}</td>
            <td className="right">{beside(each, ours)}</td>
          </tr>
        ))}
      </Rows>
    </Scroll>
  );
}

function beside({ name, hit_rate }: ShadowView, ours: number | null): string {
  if (name === OURS || hit_rate === null || ours === null) return "";
  return points(hit_rate - ours);
}
