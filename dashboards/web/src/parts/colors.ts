import { useComputedColorScheme } from "@mantine/core";
import { useMemo } from "react";

/** Reads the page's colours by name, for what is drawn on a canvas. */
export type Colors = (name: string) => string;

export function useColors(): Colors {
  const scheme = useComputedColorScheme("dark");
  return useMemo(readColors, [scheme]);
}

function readColors(): Colors {
  const style = getComputedStyle(document.documentElement);
  const probe = document.createElement("canvas").getContext("2d");
  return (name) => sixDigits(probe, style.getPropertyValue(`--${name}`).trim());
}

/** A colour as `#rrggbb`: stylesheets may say the same more briefly once they are built. */
function sixDigits(probe: CanvasRenderingContext2D | null, color: string): string {
  if (probe === null) return color;
  probe.fillStyle = color;
  return probe.fillStyle;
}

/** Red, green and blue from 0 to 1. */
export function rgb(color: string): [number, number, number] {
  const digits = parseInt(color.slice(1), 16);
  return [(digits >> 16) / 255, ((digits >> 8) & 255) / 255, (digits & 255) / 255];
}

/** `share` of one colour in another, opaque. */
export function mix(color: string, ground: string, share: number): string {
  const [over, under] = [rgb(color), rgb(ground)];
  const parts = over.map((part, each) => 255 * (share * part + (1 - share) * (under[each] ?? 0)));
  return `rgb(${parts.map(Math.round).join(" ")})`;
}
