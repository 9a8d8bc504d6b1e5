import { useEffect, useState } from "react";

import { ApiError, send } from "../../api/client";
import type { Resource } from "../../api/resource";
import type { WeightChange, WeightEffect } from "../../api/types";

const SETTLED_MS = 350; // without another keystroke

/** What a change would do to the ranking, asked once the fields have settled. */
export function useEffectOf(change: WeightChange | null): Resource<WeightEffect> {
  const [held, setHeld] = useState<Resource<WeightEffect>>({ data: undefined, error: undefined });
  const said = JSON.stringify(change);
  useEffect(() => {
    setHeld({ data: undefined, error: undefined });
    if (said === "null") return;
    let isOld = false;
    const timer = setTimeout(() => {
      send<WeightEffect>("POST", "v1/weights/preview", JSON.parse(said)).then(
        (data) => isOld || setHeld({ data, error: undefined }),
        (error: unknown) =>
          isOld || (error instanceof ApiError && setHeld({ data: undefined, error })),
      );
    }, SETTLED_MS);
    return () => {
      isOld = true;
      clearTimeout(timer);
    };
  }, [said]);
  return held;
}
