import type { ShadowView } from "../../api/types";
import { percent } from "../../format";
import { Legend } from "../../parts/Legend";
import { CEILING, colorsOf } from "./looks";

const [WIDTH, HEIGHT, LEFT, BOTTOM, RIGHT, TOP] = [520, 260, 52, 28, 20, 12];

/** Hit rate over capacity, a line a policy; the ceiling stands as a mark of its own. */
export function CapacityChart({ shadows }: { shadows: readonly ShadowView[] }) {
  const known = shadows.filter(({ hit_rate, tiers }) => hit_rate !== null && !tiers);
  const colors = colorsOf(shadows);
  const policies = [
    ...new Set(known.map(({ name, policy }) => (name === CEILING ? CEILING : policy))),
  ];
  const most = Math.max(1.25, ...known.map(({ capacity }) => capacity));
  const x = (capacity: number) => LEFT + ((WIDTH - LEFT - RIGHT) * capacity) / most;
  const least = Math.min(1, ...known.map(({ hit_rate }) => hit_rate ?? 1));
  const floor = Math.max(0, Math.floor(10 * least - 0.5) / 10);
  const y = (rate: number) =>
    HEIGHT - BOTTOM - ((HEIGHT - BOTTOM - TOP) * (rate - floor)) / (1 - floor);
  const sizes = [...new Set(known.map(({ capacity }) => capacity))].sort((a, b) => a - b);
  const said = known.map(({ name, hit_rate }) => `${name} ${percent(hit_rate, 1, 1)}`).join(", ");
  return (
    <>
      <svg
        className="capacity"
        viewBox={`0 0 ${WIDTH} ${HEIGHT}`}
        role="img"
        aria-label={`Share found over capacity: ${said}`}
      >
        {[0, 0.25, 0.5, 0.75, 1]
          .map((part) => floor + part * (1 - floor))
          .map((rate) => (
            <g key={rate}>
              <line x1={LEFT} x2={WIDTH - RIGHT} y1={y(rate)} y2={y(rate)} stroke="var(--line)" />
              <text x={LEFT - 8} y={y(rate) + 4} textAnchor="end">
                {percent(rate)}
              </text>
            </g>
          ))}
        {sizes.map((size) => (
          <text key={size} x={x(size)} y={HEIGHT - 8} textAnchor="middle">
            {size === 1 ? "as it is" : `${Math.round(size * 100)} %`}
          </text>
        ))}
        {policies.map((policy) => {
          const points = known
            .filter((each) => (each.name === CEILING ? CEILING : each.policy) === policy)
            .sort((a, b) => a.capacity - b.capacity);
          const color = `var(--${colors.get(policy) ?? "dim"})`;
          return (
            <g key={policy} fill={color} stroke={color}>
              <polyline
                fill="none"
                strokeWidth="2"
                points={points.map((at) => `${x(at.capacity)},${y(at.hit_rate ?? 0)}`).join(" ")}
              />
              {points.map((at) => (
                <circle
                  key={at.name}
                  cx={x(at.capacity)}
                  cy={y(at.hit_rate ?? 0)}
                  r={at.name === "ours" ? 6 : 4}
                >
                  <title>{`${at.sentence} ${percent(at.hit_rate, 1, 1)}`}</title>
                </circle>
              ))}
            </g>
          );
        })}
      </svg>
      <Legend
        entries={policies.map((policy) => ({ label: policy, color: colors.get(policy) ?? "dim" }))}
      />
    </>
  );
}
