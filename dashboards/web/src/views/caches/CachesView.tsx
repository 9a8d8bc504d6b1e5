import { useResource } from "../../api/resource";
import type { Caches } from "../../api/types";
import { Await, Empty } from "../../parts/states";
import { CacheRun } from "./CacheRun";

/** What caches that follow confidence hold, in transformers' own `generate`. */
export function CachesView() {
  const caches = useResource<Caches>("v1/caches", 1000);
  return (
    <Await of={caches}>
      {({ runs, at }) =>
        runs.length > 0 ? (
          <div className="stack">
            {runs.map((each) => (
              <CacheRun key={each.run} of={each} now={at} />
            ))}
          </div>
        ) : (
          <Empty title="No cache is shown">
            Put <code>with kvgraph.CacheWatch(cache, "a name"):</code> around{" "}
            <code>model.generate(…, past_key_values=cache)</code>, where the cache is a{" "}
            <code>kvgraph.ConfKVCache</code>.
          </Empty>
        )
      }
    </Await>
  );
}
