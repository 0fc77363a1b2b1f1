"""What a pod says, as a local process can have it: environment, arguments, paths and names.

Pure functions of the pod. Names of pods behind a headless service become loopback addresses, one for each
pod and restart attempt; mount paths of emptyDir volumes become local folders; both are replaced in every
value and argument.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.api import Json

ATTEMPT_LABEL = "jobset.sigs.k8s.io/restart-attempt"
TERMINATION_LOG = "/dev/termination-log"


class Unsupported(Exception):
    """The pod asks for something that a local process cannot have here."""


class ConfigError(Exception):
    """What the pod refers to does not exist (yet): its containers wait."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sandbox:
    """Where one pod runs, and what it can look up."""

    pod: Json
    folder: Path
    salt: str
    """Keeps the addresses of clusters on one machine apart."""
    image_env: Mapping[str, str]
    """What the image would set: PATH and the like."""
    read_secret: Callable[[str], Mapping[str, bytes]]
    """Content of a secret in the pod's namespace; raises ConfigError."""

    @property
    def address(self) -> str:
        return self.address_of(hostname(self.pod))

    def address_of(self, host: str) -> str:
        """The loopback address of a pod behind the same service. Another one for each restart attempt."""
        attempt = self.pod["metadata"].get("labels", {}).get(ATTEMPT_LABEL, "0")
        name = f"{self.pod['metadata']['namespace']}/{host}.{self.pod['spec'].get('subdomain')}"
        digest = hashlib.sha256(f"{self.salt}/{name}/{attempt}".encode()).digest()
        return f"127.{1 + digest[0] % 254}.{digest[1]}.{1 + digest[2] % 254}"

    def env(self, container: Json) -> dict[str, str]:
        """The whole environment of one container.

        Raises:
          Unsupported, ConfigError
        """
        if container.get("envFrom"):
            raise Unsupported("envFrom")
        scratch = self.container_folder(container)
        env = {"HOME": str(scratch), "TMPDIR": str(scratch), **self.image_env, "HOSTNAME": hostname(self.pod)}
        own: dict[str, str] = {}
        for variable in container.get("env", []):
            value = self._value(variable, own)
            if value is not None:
                own[variable["name"]] = self._localize(value, container)
        return env | own

    def argv(self, container: Json, env: Mapping[str, str]) -> list[str]:
        if not container.get("command"):
            raise Unsupported("a container without command: there is no image to take it from")
        words: Sequence[str] = [*container["command"], *container.get("args", [])]
        return [self._localize(expand(word, env), container) for word in words]

    def working_folder(self, container: Json) -> Path:
        folder = container.get("workingDir")
        return Path(self._localize(folder, container)) if folder else self.container_folder(container)

    def container_folder(self, container: Json) -> Path:
        return self.folder / str(container["name"])

    def termination_file(self, container: Json) -> Path:
        return self.container_folder(container) / "termination-log"

    def mounts(self, container: Json) -> dict[str, Path]:
        """Path in the container -> local path, for what can be had as a plain folder or file."""
        volumes = {volume["name"]: volume for volume in self.pod["spec"].get("volumes", [])}
        found = {container.get("terminationMessagePath", TERMINATION_LOG): self.termination_file(container)}
        for mount in container.get("volumeMounts", []):
            volume = volumes[mount["name"]]
            if "emptyDir" in volume:
                local = self.folder / "volumes" / mount["name"] / mount.get("subPath", "")
                found[mount["mountPath"].rstrip("/")] = local
            elif "projected" not in volume:
                # Projected: the token that every pod of every service account is given.
                raise Unsupported(f"volume {mount['name']}: {sorted(set(volume) - {'name'})}")
        return found

    def _value(self, variable: Json, own: Mapping[str, str]) -> str | None:
        source = variable.get("valueFrom")
        if source is None:
            return expand(variable.get("value", ""), own)
        if "fieldRef" in source:
            return self._field(source["fieldRef"]["fieldPath"])
        if "secretKeyRef" in source:
            return self._secret(source["secretKeyRef"])
        raise Unsupported(f"valueFrom of {variable['name']}: {sorted(source)}")

    def _secret(self, reference: Json) -> str | None:
        try:
            content = self.read_secret(reference["name"])
            if reference["key"] not in content:
                raise ConfigError(f"couldn't find key {reference['key']} in Secret {reference['name']}")
        except ConfigError:
            if reference.get("optional"):
                return None
            raise
        return content[reference["key"]].decode()

    def _field(self, path: str) -> str:
        metadata = self.pod["metadata"]
        if match := re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path):
            return str(metadata.get(match[1], {}).get(match[2], ""))
        fields = {
            "metadata.name": metadata["name"],
            "metadata.namespace": metadata["namespace"],
            "metadata.uid": metadata["uid"],
            "spec.nodeName": self.pod["spec"]["nodeName"],
            "spec.serviceAccountName": self.pod["spec"].get("serviceAccountName", ""),
            "status.hostIP": "127.0.0.1",
            "status.podIP": self.address,
        }
        if path not in fields:
            raise Unsupported(f"fieldRef {path}")
        return str(fields[path])

    def _localize(self, text: str, container: Json) -> str:
        for path, local in sorted(self.mounts(container).items(), reverse=True):
            replacement = str(local).replace("\\", r"\\")
            text = re.sub(rf"(?<![\w./-]){re.escape(path)}(?![\w.-])", replacement, text)
        subdomain = self.pod["spec"].get("subdomain")
        if not subdomain:
            return text
        suffix = rf"(?:\.{re.escape(self.pod['metadata']['namespace'])}\.svc(?:\.cluster\.local)?)?"
        name = rf"(?<![\w.-])([a-z0-9][a-z0-9-]*)\.{re.escape(subdomain)}{suffix}(?![\w.-])"
        return re.sub(name, lambda match: self.address_of(match[1]), text)


def hostname(pod: Json) -> str:
    return str(pod["spec"].get("hostname") or pod["metadata"]["name"])


def expand(text: str, env: Mapping[str, str]) -> str:
    """As the kubelet does it: k8s.io/kubernetes third_party/forked/golang/expansion/expand.go."""

    def parts() -> Iterator[str]:
        rest = text
        while rest:
            head, dollar, rest = rest.partition("$")
            yield head
            if not dollar or not rest:
                yield dollar
            elif rest[0] == "$":
                rest = rest[1:]
                yield "$"
            elif rest[0] == "(" and ")" in rest:
                name, _, rest = rest[1:].partition(")")
                yield env.get(name, f"$({name})")
            else:
                yield "$" + rest[0]
                rest = rest[1:]

    return "".join(parts())
