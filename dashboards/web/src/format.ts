/** Numbers, durations and times as people read them. */

const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const UNKNOWN = "–";

export function compact(value: number | null | undefined): string {
  return value == null ? UNKNOWN : COMPACT.format(value);
}

export function whole(value: number | null | undefined): string {
  return value == null ? UNKNOWN : WHOLE.format(value);
}

/** So many of something, whose name takes an "s" in the plural. */
export function counted(count: number | null | undefined, name: string): string {
  return `${whole(count)} ${name}${count === 1 ? "" : "s"}`;
}

/** `part` of `all` in percent; nothing of nothing is unknown, and 100 % is all of it. */
export function percent(part: number | null | undefined, all = 1, digits = 0): string {
  if (part == null || all === 0) return UNKNOWN;
  const said = ((100 * part) / all).toFixed(digits);
  const most = (100 - 10 ** -digits).toFixed(digits);
  return Number(said) === 100 && part < all ? `>${most} %` : `${said} %`;
}

export function points(difference: number | null): string {
  if (difference === null) return UNKNOWN;
  const rounded = (100 * difference).toFixed(1);
  return `${difference >= 0 ? "+" : "−"}${rounded.replace("-", "")} points`;
}

export function bytes(count: number): string {
  if (count >= 1e9) return `${(count / 1e9).toFixed(count >= 1e10 ? 0 : 1)} GB`;
  return count >= 1e6 ? `${(count / 1e6).toFixed(0)} MB` : `${(count / 1e3).toFixed(0)} kB`;
}

export function duration(seconds: number | null | undefined): string {
  if (seconds == null) return UNKNOWN;
  const size = Math.abs(seconds);
  if (size < 1) return `${Math.round(seconds * 1000)} ms`;
  if (size < 10) return `${seconds.toFixed(1)} s`;
  if (size < 120) return `${Math.round(seconds)} s`;
  if (size < 7200) return `${Math.round(seconds / 60)} min`;
  return size < 172_800 ? `${(seconds / 3600).toFixed(1)} h` : `${Math.round(seconds / 86_400)} d`;
}

/** A term of a score: two decimals while it is small. */
export function signed(value: number): string {
  return Math.abs(value) < 100 ? value.toFixed(2) : COMPACT.format(value);
}

/** A moment of today as the clock on the wall shows it. */
export function clock(unixSeconds: number): string {
  return new Date(unixSeconds * 1000).toLocaleTimeString([], { hour12: false });
}

/** The end of a block's key, which tells it from its neighbours. */
export function shortKey(key: string): string {
  return key.startsWith("0x") && key.length > 10 ? `…${key.slice(-8)}` : key;
}

/** A code word of the API as a word. */
export function words(code: string): string {
  return code.replaceAll("_", " ");
}

const [LONG, HEAD, TAIL] = [20, 6, 10];

/** A long name by its beginning and its end, which tell names of one kind apart. */
export function shortened(name: string): string {
  return name.length <= LONG ? name : `${name.slice(0, HEAD)}…${name.slice(-TAIL)}`;
}
