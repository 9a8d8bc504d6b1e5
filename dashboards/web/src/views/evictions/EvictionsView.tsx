import "./evictions.css";

import { Tabs } from "@mantine/core";

import { change, useRoute } from "../../route";
import { EvictionLog } from "./EvictionLog";
import { RankingTable } from "./RankingTable";

/** Who goes next and why, and who went. */
export function EvictionsView() {
  const { params } = useRoute();
  const tab = params.get("tab") ?? "next";
  const engine = params.get("engine");
  return (
    <Tabs
      value={tab}
      onChange={(value) => change({ tab: value, eviction: null })}
      keepMounted={false}
    >
      <Tabs.List mb="md">
        <Tabs.Tab value="next">Who is next</Tabs.Tab>
        <Tabs.Tab value="log">Who left</Tabs.Tab>
      </Tabs.List>
      <Tabs.Panel value="next">
        <RankingTable engine={engine} />
      </Tabs.Panel>
      <Tabs.Panel value="log">
        <EvictionLog engine={engine} />
      </Tabs.Panel>
    </Tabs>
  );
}
