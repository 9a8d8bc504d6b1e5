import { useResource } from "../../api/resource";
import type { Shadows } from "../../api/types";
import { percent } from "../../format";
import { linkTo } from "../../route";

const TWICE = 2;

/** What a pool twice as large finds of the same traffic, as its shadow counts it. */
export function LargerPool({ engine }: { engine: string }) {
  const { data } = useResource<Shadows>(`v1/shadows?engine=${encodeURIComponent(engine)}`, 5000);
  const twice = data?.shadows.find(
    (each) => each.capacity === TWICE && !each.tiers && each.policy !== "lru",
  );
  if (twice?.hit_rate == null || twice.ours === null) return null;
  return (
    <p className="sentence wrap">
      <b>Measured on this traffic:</b> a pool twice as large finds {percent(twice.hit_rate, 1, 1)}{" "}
      of what prompts ask for, where this one finds {percent(twice.ours, 1, 1)}.{" "}
      <span className="ways">
        <a href={linkTo("whatif", { engine })}>What if</a>
      </span>
    </p>
  );
}
