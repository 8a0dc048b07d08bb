"""
Checks of what `hf-specdec serve`, and commands that answer as it does, are asked for. They import little: the engine's
process begins after them.
"""

from __future__ import annotations

import errno
import importlib.util
import socket
import ssl

import typer


PACKAGES = ("fastapi", "uvicorn", "httptools", "openai", "prometheus_client")


def check_packages(command: str) -> None:
    """
    Checks that what the server needs is installed, for a command.

    Raises:
        typer.BadParameter: if not.
    """
    missing = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        raise typer.BadParameter(
            f"needs {', '.join(missing)}. Install with `pip install 'hf-specdec[serve]'`.", param_hint=command
        )


def check_address(host: str, port: int) -> None:
    """
    Checks that a server can listen at an address.

    Raises:
        typer.BadParameter: if not; the error names the option.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise typer.BadParameter(f"{host!r} is no address: {error}.", param_hint="--host") from error
    strange: list[OSError] = []
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise typer.BadParameter(
                    f"{port} cannot be listened at: {error.strerror}. Give another, or 0 for any that is free.",
                    param_hint="--port",
                ) from error
            strange.append(error)
    if len(strange) == len(found):
        raise typer.BadParameter(
            f"{host!r} is no address of this machine: {strange[0].strerror}.", param_hint="--host"
        ) from strange[0]


def adapters_in(options: list[str], model: str) -> dict[str, str]:
    """
    The adapters of `--lora`: Hub id or folder of each, by name.

    Raises:
        ValueError: for a name that is missing, given twice, that of the model, or no name to PEFT.
    """
    found: dict[str, str] = {}
    for option in options:
        name, equals, place = option.partition("=")
        if not (name and equals and place):
            raise ValueError(f"{option!r} is not NAME=FOLDER.")
        if name in found or name == model:
            raise ValueError(f"{name!r} is the name of two models. Give another.")
        if "." in name:
            raise ValueError(f"{name!r} has a dot, which PEFT takes in no name. Give another.")
        found[name] = place
    return found


def check_certificate(certificate: str | None, key: str | None) -> None:
    """
    Checks that a certificate can be used.

    Raises:
        typer.BadParameter: if not; the error names the option.
    """
    if certificate is None:
        if key is not None:
            raise typer.BadParameter("belongs to --ssl-certfile.", param_hint="--ssl-keyfile")
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:
        raise typer.BadParameter(
            f"{certificate!r} and its key cannot be used: {error}. Give files in PEM format, the key without a "
            "password.",
            param_hint="--ssl-certfile",
        ) from error
