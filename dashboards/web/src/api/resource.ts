import { useEffect, useRef, useState } from "react";

import { ApiError, ask } from "./client";
import { heartbeat, useBeat } from "./heartbeat";

/** What is known of an answer: the last good one stays while the sidecar is away. */
export interface Resource<T> {
  readonly data: T | undefined;
  readonly error: ApiError | undefined;
}

/** How to ask for no more than what came since, and to put it to what is known. */
export interface Delta<T> {
  /** What to append to the path, which has a `?` already; "" asks for all. */
  readonly after: (known: T) => string;
  /** Null where the answer does not fit to what is known: then all is asked for. */
  readonly joined: (known: T, since: T) => T | null;
}

interface Question {
  readonly path: string | null;
  readonly at: number;
  busy: boolean;
}

/**
 * The answer at `path`, asked again at each beat (at most every `everyMs`); null asks nothing. With a
 * `delta`, which must stay the same object, only what is new is asked for.
 */
export function useResource<T>(path: string | null, everyMs = 1000, delta?: Delta<T>): Resource<T> {
  const [held, setHeld] = useState<Resource<T> & { path: string | null }>(nothing(path));
  const beat = useBeat();
  const asked = useRef<Question>({ path: null, at: 0, busy: false });

  useEffect(() => {
    const now = performance.now();
    const last = asked.current;
    if (path === null) return;
    if (last.path === path && (last.busy || now - last.at < everyMs)) return;
    const mine: Question = { path, at: now, busy: true };
    asked.current = mine;
    const known = held.path === path ? held.data : undefined;
    const settle = (next: Partial<Resource<T>>) => {
      mine.busy = false;
      if (asked.current !== mine) return;
      setHeld((old) => ({
        ...(old.path === path ? old : nothing<T>(path)),
        error: undefined,
        ...next,
      }));
    };
    askOn(path, known, delta).then(
      (data) => {
        heartbeat.saw(200);
        settle({ data });
      },
      (error: unknown) => {
        const failed = error instanceof ApiError ? error : new ApiError(500, String(error));
        heartbeat.saw(failed.status);
        settle({ error: failed });
      },
    );
  }, [path, beat, everyMs, delta]);

  return held.path === path ? held : nothing(path);
}

async function askOn<T>(path: string, known: T | undefined, delta?: Delta<T>): Promise<T> {
  if (known === undefined || delta === undefined) return ask<T>(path);
  return delta.joined(known, await ask<T>(path + delta.after(known))) ?? ask<T>(path);
}

function nothing<T>(path: string | null): Resource<T> & { path: string | null } {
  return { path, data: undefined, error: undefined };
}
