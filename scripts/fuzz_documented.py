"""Requests that schemathesis makes from a server's OpenAPI document, valid and not, and whether
the answers are as documented. Needs the extra `fuzz`.
"""

from collections.abc import Callable
from contextlib import suppress

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

CHECKS = [response_schema_conformance, status_code_conformance]
# Told of each answer: the operation, the status, what is wrong with it or "".
Listener = Callable[[str, str, str], None]


def send_documented(url: str, count: int, listener: Listener) -> None:
    """About `count` requests, over all operations that take anything, half of them wrong on
    purpose.
    """
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    found = [operation.ok() for operation in schema.get_all_operations()]
    operations = [one for one in found if one.body or one.path_parameters]
    each = -(-count // (2 * len(operations)))
    for operation in operations:
        for mode in (GenerationMode.NEGATIVE, GenerationMode.POSITIVE):
            with suppress(Unsatisfiable):  # whatever is sent, it is never wrong, or never right
                _send(url, operation, mode, each, listener)


def _send(
    url: str, operation: APIOperation, mode: GenerationMode, count: int, listener: Listener
) -> None:
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def send(case: Case) -> None:
        response = case.call(base_url=url, timeout=60)
        status = response.status_code
        fault = f"status {status}" if status >= 500 and status != 503 else ""
        try:
            case.validate_response(response, checks=CHECKS)
        except BaseExceptionGroup as error:
            fault = fault or "; ".join(str(one).splitlines()[0] for one in error.exceptions)
        listener(operation.label, str(status), fault)

    send()
