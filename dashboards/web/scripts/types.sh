#!/bin/sh
# Types of the API's answers, from the schema that the sidecar serves at /v1/openapi.json.
set -eu
cd "$(dirname "$0")/.."
schema=$(mktemp)
trap 'rm -f "$schema"' EXIT
"${PYTHON:-python3}" - >"$schema" <<'PYTHON'
import json
from fastapi.openapi.utils import get_openapi
from kvgraph.advisor.page.status import page_router

router = page_router(None, lambda: None, lambda: None)
print(json.dumps(get_openapi(title="kvgraph", version="1", routes=router.routes)))
PYTHON
node_modules/.bin/openapi-typescript "$schema" --default-non-nullable=true -o "${1:-src/api/schema.d.ts}"
