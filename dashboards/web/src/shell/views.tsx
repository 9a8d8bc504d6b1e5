import {
  IconArrowsExchange,
  IconChartAreaLine,
  IconChartDots3,
  IconEye,
  IconGauge,
  IconLogout2,
  IconRoute2,
  IconScale,
  IconServer2,
  IconTargetOff,
} from "@tabler/icons-react";
import type { ComponentType } from "react";

import { CachesView } from "../views/caches/CachesView";
import { EnginesView } from "../views/engines/EnginesView";
import { EvictionsView } from "../views/evictions/EvictionsView";
import { GraphPage } from "../views/graph/GraphPage";
import { MissesView } from "../views/misses/MissesView";
import { NowView } from "../views/now/NowView";
import { SampledView } from "../views/sampled/SampledView";
import { SessionsView } from "../views/sessions/SessionsView";
import { WeightsView } from "../views/weights/WeightsView";
import { WhatIfView } from "../views/whatif/WhatIfView";

export interface View {
  readonly id: string;
  readonly title: string;
  /** What it answers, for the head of the page. */
  readonly question: string;
  readonly icon: ComponentType<{ size?: number; stroke?: number }>;
  readonly show: ComponentType;
}

export const VIEWS: readonly View[] = [
  { id: "now", title: "Now", question: "Is it helping?", icon: IconGauge, show: NowView },
  {
    id: "graph",
    title: "Graph",
    question: "What does the cache hold?",
    icon: IconChartDots3,
    show: GraphPage,
  },
  {
    id: "misses",
    title: "Misses",
    question: "Why did a request miss?",
    icon: IconTargetOff,
    show: MissesView,
  },
  {
    id: "evictions",
    title: "Evictions",
    question: "Who left, and who is next?",
    icon: IconLogout2,
    show: EvictionsView,
  },
  {
    id: "whatif",
    title: "What if",
    question: "What would others have found?",
    icon: IconArrowsExchange,
    show: WhatIfView,
  },
  {
    id: "weights",
    title: "Weights",
    question: "What decides the ranking?",
    icon: IconScale,
    show: WeightsView,
  },
  {
    id: "sessions",
    title: "Sessions",
    question: "Who is here, and what do they hold?",
    icon: IconRoute2,
    show: SessionsView,
  },
  {
    id: "sampled",
    title: "Attention",
    question: "Where does the model look, and how sure is it?",
    icon: IconEye,
    show: SampledView,
  },
  {
    id: "caches",
    title: "Caches",
    question: "How much does a model keep while it is sure?",
    icon: IconChartAreaLine,
    show: CachesView,
  },
  {
    id: "engines",
    title: "Engines",
    question: "Are engines and tiers well?",
    icon: IconServer2,
    show: EnginesView,
  },
];
