/** What sessions do, in the order in which bars show it; `none`: blocks of no session. */
export const STATES = [
  { name: "running", color: "accent" },
  { name: "waiting_for_tool", color: "prefetched" },
  { name: "idle", color: "loaded" },
  { name: "ended", color: "generation" },
  { name: "none", color: "computed" },
] as const;
