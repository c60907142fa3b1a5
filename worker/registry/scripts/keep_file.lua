-- Keep an uploaded file. KEYS: where its lines are staged, where they go, the files of its tenant.
-- ARGV: its id, how many lines it has, their bytes, what else is known of it (JSON), ms to keep it, the most files and
-- bytes that the tenant may have.
-- Returns 'kept' and its entry; 'known' and the entry of one kept before under this id; 'incomplete' and how many lines
-- are there; 'full', what of, how much the tenant has, and the most.
local STAGED, LINES, FILES = KEYS[1], KEYS[2], KEYS[3]
local id, num_lines, size, about = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local keep_ms, most_files, most_bytes = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local now = now_ms()

-- What has expired counts no more, and is forgotten here: its lines went by themselves.
local gone, num_files, bytes, last = {}, 0, 0, now + keep_ms
local entries = redis.call('HGETALL', FILES)
for i = 1, #entries, 2 do
  local _, ends, of_file = string.match(entries[i + 1], '^(%d+) (%d+) (%d+) ')
  if tonumber(ends) <= now then
    gone[#gone + 1] = entries[i]
  elseif entries[i] == id then
    redis.call('UNLINK', STAGED)
    return {'known', entries[i + 1]}
  else
    num_files, bytes, last = num_files + 1, bytes + of_file, math.max(last, tonumber(ends))
  end
end
local num_staged = redis.call('HLEN', STAGED)
if num_staged ~= num_lines then return {'incomplete', num_staged} end
if num_files + 1 > most_files then return {'full', 'files', num_files, most_files} end
if bytes + size > most_bytes then return {'full', 'bytes', bytes, most_bytes} end

local entry = string.format('%.0f %.0f %.0f %s', now, now + keep_ms, size, about)
redis.call('HSET', FILES, id, entry)
for _, old in ipairs(gone) do redis.call('HDEL', FILES, old) end
redis.call('RENAME', STAGED, LINES)
redis.call('PEXPIRE', LINES, string.format('%.0f', keep_ms))
redis.call('PEXPIRE', FILES, string.format('%.0f', last - now))
return {'kept', entry}
