from __future__ import annotations

import json
from typing import Any

from engine.server.openapi import BODIES


def test_every_route_that_takes_a_body_says_which(live: Any) -> None:
    document = live.http.get("/openapi.json").json()
    posted = {path for path, operations in document["paths"].items() if "post" in operations}
    assert posted - set(BODIES) == {"/engine/flush", "/v1/responses/{name}/cancel"}
    schemas = document["components"]["schemas"]
    for path, kind in BODIES.items():
        reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        schema = schemas[reference.removeprefix("#/components/schemas/")]
        assert set(schema["properties"]) == set(kind.__struct_fields__), path
    for piece in json.dumps(document).split('"$ref": "#/components/schemas/')[1:]:
        assert piece.split('"')[0] in schemas
    assert document == live.http.get("/openapi.json").json()  # asked twice, it is the same
