import { Button } from "@mantine/core";

import { clock, whole } from "../../format";
import { change } from "../../route";
import type { ThatTime } from "./thatTime";

const STEPS = 1000;

/** A slider through a session's past; the rest of the panel shows the moment that it stands at. */
export function TimeTravel(props: { reach: [number, number]; then: ThatTime | null }) {
  const { reach, then } = props;
  const [first, last] = reach;
  const to = (step: number) => first + ((last - first) * step) / STEPS;
  const step = then === null ? STEPS : (STEPS * (then.at - first)) / (last - first);
  const said = then === null ? "now" : `as of ${clock(then.at)}`;
  return (
    <div className="travel">
      <label>
        <span>Go back in time</span>
        <input
          type="range"
          min={0}
          max={STEPS}
          value={Math.round(step)}
          aria-valuetext={said}
          onChange={({ currentTarget: { value } }) =>
            change({ at: Number(value) >= STEPS ? null : to(Number(value)).toFixed(3) })
          }
        />
      </label>
      <p role="status">
        {then === null ? (
          <span className="dim">Shown as it is now. Move the slider to see an earlier moment.</span>
        ) : (
          <>
            <b>{clock(then.at)}</b>: {then.doing}; of its blocks, {whole(then.pool)} were in the
            pool, {whole(then.warm)} had copies in warm memory and {whole(then.cold)} on cold
            storage.{" "}
            <Button size="compact-xs" variant="default" onClick={() => change({ at: null })}>
              Back to now
            </Button>
          </>
        )}
      </p>
    </div>
  );
}
