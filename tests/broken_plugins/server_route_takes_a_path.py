"""Answers at a path of the server itself."""

from broken_parts import offer

from engine.hooks import hookimpl

CAUGHT_BY = "test_no_path_is_taken"


def names():
    return {}


def build(options, *, state):
    import fastapi

    router = fastapi.APIRouter()
    router.add_api_route("/v1/models", names, methods=["GET"])
    return router


@hookimpl
def server_routes():
    return [offer(build)]
