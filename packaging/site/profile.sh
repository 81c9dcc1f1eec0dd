# gpuguard for all users of a machine without environment modules, as /etc/profile.d/gpuguard.sh: see docs/sites.md.
# Read by every login shell: it starts no program, and does nothing where gpuguard is not installed.
if [ -x @ROOT@/bin/gpuguard ]; then
  case ":$PATH:" in
    *:@ROOT@/bin:*) ;;
    *) PATH="$PATH:@ROOT@/bin" ;;
  esac
  case ":${XDG_DATA_DIRS:=/usr/local/share:/usr/share}:" in
    *:@ROOT@/share:*) ;;
    *) XDG_DATA_DIRS="@ROOT@/share:$XDG_DATA_DIRS" ;;
  esac
  export PATH XDG_DATA_DIRS
fi
