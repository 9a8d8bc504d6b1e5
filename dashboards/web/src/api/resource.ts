import { useEffect, useRef, useState } from "react";

import { ApiError, ask } from "./client";
import { heartbeat, useBeat } from "./heartbeat";

/** What is known of an answer: the last good one stays while the sidecar is away. */
export interface Resource<T> {
  readonly data: T | undefined;
  readonly error: ApiError | undefined;
}

interface Question {
  readonly path: string | null;
  readonly at: number;
  busy: boolean;
}

/** The answer at `path`, asked again at each beat (at most every `everyMs`); null asks nothing. */
export function useResource<T>(path: string | null, everyMs = 1000): Resource<T> {
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
    const settle = (next: Partial<Resource<T>>) => {
      mine.busy = false;
      if (asked.current !== mine) return;
      setHeld((old) => ({
        ...(old.path === path ? old : nothing<T>(path)),
        error: undefined,
        ...next,
      }));
    };
    ask<T>(path).then(
      (data) => {
        heartbeat.saw(200);
        settle({ data });
      },
      (error: unknown) => {
        const known = error instanceof ApiError ? error : new ApiError(500, String(error));
        heartbeat.saw(known.status);
        settle({ error: known });
      },
    );
  }, [path, beat, everyMs]);

  return held.path === path ? held : nothing(path);
}

function nothing<T>(path: string | null): Resource<T> & { path: string | null } {
  return { path, data: undefined, error: undefined };
}
