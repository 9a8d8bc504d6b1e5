import { type PointerEvent, useMemo } from "react";

import type { GraphStage } from "./GraphStage";

interface Finger {
  x: number;
  y: number;
}

/** Drags, pinches and clicks on a stage, with a mouse or with fingers. */
export function usePinch(
  stage: GraphStage | null,
  onClick: (px: number, py: number) => void,
  slack: number,
) {
  const fingers = useMemo(() => new Map<number, Finger>(), []);
  const travel = useMemo(() => ({ pixels: 0 }), []);

  const onPointerDown = (event: PointerEvent) => {
    if (fingers.size === 0) travel.pixels = 0;
    fingers.set(event.pointerId, placeOf(event));
    event.currentTarget.setPointerCapture(event.pointerId);
  };

  const onPointerMove = (event: PointerEvent) => {
    const before = fingers.get(event.pointerId);
    if (before === undefined || stage === null) return;
    const now = placeOf(event);
    const other = [...fingers].find(([id]) => id !== event.pointerId)?.[1];
    if (other === undefined) stage.camera.pan(now.x - before.x, now.y - before.y);
    else stage.camera.zoomAt(apart(now, other) / apart(before, other), other.x, other.y);
    travel.pixels += apart(now, before);
    fingers.set(event.pointerId, now);
    stage.keep();
  };

  const onPointerUp = (event: PointerEvent) => {
    const wasDown = fingers.delete(event.pointerId);
    if (wasDown && travel.pixels <= slack && event.type === "pointerup") {
      const { x, y } = placeOf(event);
      onClick(x, y);
    }
  };

  const isDragging = () => fingers.size > 0 && travel.pixels > slack;
  return { onPointerDown, onPointerMove, onPointerUp, isDragging };
}

function placeOf({ nativeEvent }: PointerEvent): Finger {
  return { x: nativeEvent.offsetX, y: nativeEvent.offsetY };
}

function apart(one: Finger, other: Finger): number {
  return Math.max(1e-3, Math.hypot(one.x - other.x, one.y - other.y));
}
