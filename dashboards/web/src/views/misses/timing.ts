import type { RequestView } from "../../api/types";

/** Seconds that a request took, by what it did in them. */
export interface Timing {
  readonly all: number;
  /** Until there was room for its context. */
  readonly held: number;
  readonly queue: number;
  /** By the measured speed of prefills; null: none was measured. */
  readonly prompt: number | null;
  /** What is left: its answer, and all that ran beside it. */
  readonly rest: number;
}

/** Tokens of a prompt that were computed, those of its partial block among them. */
export function computedTokens({ prompt_tokens, blocks, block_size }: RequestView): number {
  return prompt_tokens - (blocks.asked - blocks.computed) * block_size;
}

/** Null while a request runs; `rate` is in tokens per second. */
export function timingOf(request: RequestView, rate: number | null): Timing | null {
  if (request.ended_at === null) return null;
  const ran = Math.max(0, request.ended_at - request.at);
  const prompt = rate ? Math.min(ran, computedTokens(request) / rate) : null;
  const held = Math.min(request.waited_s, request.wait?.held_s ?? 0);
  return {
    all: request.waited_s + ran,
    held,
    queue: request.waited_s - held,
    prompt,
    rest: ran - (prompt ?? 0),
  };
}

/** What took more than half of a request's time, where that is nothing that a cache can end. */
export function beyondTheCache(timing: Timing | null): "queue" | "rest" | null {
  if (timing === null) return null;
  if (timing.held + timing.queue > timing.all / 2) return "queue";
  if (timing.prompt === null) return null;
  return timing.rest > timing.all / 2 ? "rest" : null;
}

export type Part = "held" | "queue" | "prompt" | "rest";

/** The part that took longest; null while it runs, or where nobody can tell prompt from answer. */
export function longestOf(timing: Timing | null): Part | null {
  if (timing === null) return null;
  const { held, queue, prompt, rest } = timing;
  const parts: [Part, number][] = [
    ["held", held],
    ["queue", queue],
    ["prompt", prompt ?? 0],
    ["rest", rest],
  ];
  const [longest] = parts.sort((one, other) => other[1] - one[1])[0]!;
  return prompt === null && longest === "rest" ? null : longest;
}

/** Tokens that it computed though they had been there; `seconds` is null where nobody can tell. */
export function againOf(request: RequestView, rate: number | null) {
  const tokens = request.again * request.block_size;
  const prompt = timingOf(request, rate)?.prompt ?? null;
  const computed = computedTokens(request);
  return { tokens, seconds: prompt === null || !computed ? null : (prompt * tokens) / computed };
}

/**
 * Seconds that a cache could have saved at most: those of what was computed again, or where nothing
 * of it had been here, but somewhere, of all that was computed; null where nobody can tell.
 */
export function mostSaved(request: RequestView, rate: number | null): number | null {
  const prompt = timingOf(request, rate)?.prompt ?? null;
  if (prompt === null || request.miss === null || request.miss.reason === "never_seen")
    return prompt === null ? null : 0;
  return request.again > 0 ? againOf(request, rate).seconds : prompt;
}

const LITTLE = 0.01; // share of a request's time that is not worth a sentence; chosen

export function isWorthTelling(saved: number | null, timing: Timing | null): boolean {
  return saved === null || timing === null || saved >= LITTLE * timing.all;
}
