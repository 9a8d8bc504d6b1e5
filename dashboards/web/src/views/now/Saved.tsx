import { SegmentedControl } from "@mantine/core";
import { useState } from "react";

import type { Now, TokenWindow } from "../../api/types";
import { compact, counted, duration, percent, points, UNKNOWN } from "../../format";
import { Bar } from "../../parts/Bar";
import { Figure } from "../../parts/Figure";
import { Legend } from "../../parts/Legend";
import { SOURCES } from "./sources";

/** Whether it helps, in a sentence and in five numbers over a window. */
export function Saved({ now }: { now: Now }) {
  const [chosen, choose] = useState<string>();
  const busy = now.windows.find((each) => each.asked > 0) ?? now.windows.at(-1);
  const window = now.windows.find((each) => String(each.seconds) === chosen) ?? busy;
  return (
    <section className="panel saved" aria-label="Is it helping?">
      <div className="verdict">
        <p>{window?.verdict ?? now.verdict}</p>
        <SegmentedControl
          size="xs"
          aria-label="Over the last"
          data={now.windows.map((each) => ({ value: String(each.seconds), label: named(each) }))}
          value={String(window?.seconds)}
          onChange={choose}
        />
      </div>
      {window !== undefined && <Window window={window} rate={now.prefill_tokens_per_s} />}
    </section>
  );
}

function Window({ window, rate }: { window: TokenWindow; rate: number | null }) {
  const cached = window.asked - window.computed;
  const slices = SOURCES.map(({ name, color }) => ({ label: name, color, value: window[name] }));
  return (
    <>
      <dl className="figures">
        <Figure
          label="From the cache"
          value={percent(cached, window.asked, 1)}
          note={`of ${compact(window.asked)} tokens, last ${named(window)}`}
          tone="accent"
        />
        <Figure
          label="Stock LRU would have"
          value={percent(window.lru, window.asked, 1)}
          note={besideLru(cached, window)}
        />
        <Figure
          label="Tokens not computed"
          value={window.asked === 0 ? UNKNOWN : compact(cached)}
          note={`in ${counted(window.requests, "request")}`}
        />
        <Figure
          label="Computing saved"
          value={duration(window.saved_s)}
          note={rate === null ? "no prefill rate measured yet" : `at ${compact(rate)} tokens/s`}
        />
        <Figure
          label="Beside stock LRU"
          value={besideOurs(window.saved_beside_lru_s)}
          note="of computing, in this window"
          {...toneOf(window.saved_beside_lru_s)}
        />
      </dl>
      <Bar label="Prompt tokens by where they came from" slices={slices} />
      <Legend
        entries={slices
          .filter((slice) => slice.value > 0)
          .map((slice) => ({ ...slice, value: percent(slice.value, window.asked, 1) }))}
      />
    </>
  );
}

function named({ seconds }: TokenWindow): string {
  return seconds >= 3600 ? `${seconds / 3600} h` : `${Math.round(seconds / 60)} min`;
}

function besideLru(cached: number, { lru, asked }: TokenWindow): string {
  if (lru === null || asked === 0) return "no shadow counts yet";
  return `we are at ${points((cached - lru) / asked)}`;
}

function besideOurs(seconds: number | null): string {
  if (seconds === null) return UNKNOWN;
  return seconds > 0 ? `+${duration(seconds)}` : duration(seconds);
}

function toneOf(seconds: number | null): { tone?: string } {
  if (seconds === null || seconds === 0) return {};
  return { tone: seconds > 0 ? "good" : "bad" };
}
