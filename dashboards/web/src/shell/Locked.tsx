import { Empty } from "../parts/states";

export function Locked() {
  return (
    <Empty title="This page needs the sidecar's token">
      Any user of this machine can reach this address, and the page names sessions. Run{" "}
      <code>kvgraph open</code> as the user who runs the sidecar, or follow the address in its log:
      it carries the token once, and this browser then keeps it.
    </Empty>
  );
}
