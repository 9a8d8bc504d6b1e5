/** The colour of each reason for a miss: what could have been found is warm, the rest is cool. */
const COLORS: Record<string, string> = {
  never_seen: "generation",
  diverged: "context",
  evicted: "rules",
  other_engine: "memories",
  load_slower: "loaded",
  in_store: "cold",
  copy_lost: "warm",
  reset: "axioms",
  not_cacheable: "computed",
  unknown: "shadow",
  other_salt: "affect",
  other_group: "capabilities",
};

export function colorOf(reason: string): string {
  return COLORS[reason] ?? "shadow";
}
