import { expect, test } from "vitest";

import { linkTo, parseRoute } from "./route";

test("an address without a view is the first one", () => {
  expect(parseRoute("").view).toBe("now");
  expect(parseRoute("#/").view).toBe("now");
});

test("whatever stands in a parameter comes back as it was", () => {
  const name = "a/b?c=d&e#<script>%00\u202e";
  const route = parseRoute(linkTo("sessions", { session: name, tenant: null }));
  expect(route.view).toBe("sessions");
  expect(route.params.get("session")).toBe(name);
  expect(route.params.has("tenant")).toBe(false);
});
