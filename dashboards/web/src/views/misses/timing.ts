import type { RequestView } from "../../api/types";

/** Seconds that a request took, by what it did in them. */
export interface Timing {
  readonly all: number;
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
  return {
    all: request.waited_s + ran,
    queue: request.waited_s,
    prompt,
    rest: ran - (prompt ?? 0),
  };
}

/** What took more than half of a request's time, where that is nothing that a cache can end. */
export function beyondTheCache(timing: Timing | null): "queue" | "rest" | null {
  if (timing === null || timing.prompt === null) return null;
  if (timing.queue > timing.all / 2) return "queue";
  return timing.rest > timing.all / 2 ? "rest" : null;
}

/** Those that took longest first; those that run are not known to be fast. */
export function slowestFirst(requests: readonly RequestView[]): RequestView[] {
  const took = (each: RequestView) => timingOf(each, null)?.all ?? Infinity;
  return [...requests].sort((one, other) => took(other) - took(one) || other.id - one.id);
}
