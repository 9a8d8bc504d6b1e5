/** Where tokens of prompts came from, in the order in which bars show it. */
export const SOURCES = [
  { name: "pool", color: "pool" },
  { name: "prefetched", color: "prefetched" },
  { name: "loaded", color: "loaded" },
  { name: "computed", color: "computed" },
] as const;
