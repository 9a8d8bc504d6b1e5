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

/** Null while a request runs. */
export function timingOf(request: RequestView): Timing | null {
  if (request.ended_at === null) return null;
  const ran = Math.max(0, request.ended_at - request.at);
  const prompt = request.prompt_s ?? null;
  const held = Math.min(request.waited_s, request.wait?.held_s ?? 0);
  return {
    all: request.waited_s + ran,
    held,
    queue: request.waited_s - held,
    prompt,
    rest: Math.max(0, ran - (prompt ?? 0)),
  };
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
export function againOf(request: RequestView) {
  const tokens = request.again * request.block_size;
  const prompt = request.prompt_s ?? null;
  const computed = computedTokens(request);
  return { tokens, seconds: prompt === null || !computed ? null : (prompt * tokens) / computed };
}
