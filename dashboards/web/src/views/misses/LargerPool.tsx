import { useResource } from "../../api/resource";
import type { Shadows } from "../../api/types";
import { percent } from "../../format";
import { linkTo } from "../../route";

const TWICE = 2;

/** What a pool twice as large finds of the same traffic, as its shadow counts it. */
export function LargerPool({ engine }: { engine: string }) {
  const { data } = useResource<Shadows>(`v1/shadows?engine=${encodeURIComponent(engine)}`, 5000);
  const larger = data?.shadows.filter(
    (each) => each.capacity === TWICE && !each.tiers && each.hit_rate !== null,
  );
  // A policy's shadow follows only while somebody looks at shadows; LRU's always does.
  const twice = larger?.find((each) => each.policy !== "lru") ?? larger?.[0];
  if (twice?.hit_rate == null || twice.ours === null) return null;
  const under = twice.policy === "lru" ? " under LRU" : "";
  return (
    <p className="sentence wrap">
      <b>Measured on this traffic:</b> a pool twice as large{under} finds{" "}
      {percent(twice.hit_rate, 1, 1)} of what prompts ask for, where this one finds{" "}
      {percent(twice.ours, 1, 1)}.{" "}
      <span className="ways">
        <a href={linkTo("whatif", { engine })}>What if</a>
      </span>
    </p>
  );
}
