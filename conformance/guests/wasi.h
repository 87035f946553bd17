/* Verbs of the WASI variant. Each logs the errno and what came of it. */

static u8 wasi_room[70000];

static void wasi_say(Text whole, i32 errno_, i32 has_value, i64 value, Text more) {
  Line line;
  begin(&line);
  put_raw(&line, whole);
  put_text(&line, " = ");
  put_number(&line, errno_);
  if (has_value) {
    put(&line, ' ');
    put_number(&line, value);
  }
  if (more.at) {
    put(&line, ' ');
    put_bytes(&line, more);
  }
  say(&line);
}

static void wasi_write(Text whole, u32 fd, Text text) {
  u32 pieces[4] = {(u32)text.at, text.len / 2, (u32)text.at + text.len / 2, text.len - text.len / 2};
  u32 written = 0;
  i32 errno_ = wasi_fd_write(fd, (u32)pieces, 2, (u32)&written);
  wasi_say(whole, errno_, errno_ == 0, written, (Text){0, 0});
}

static void wasi_random(Text whole, u32 n) {
  memset(wasi_room, 0, sizeof wasi_room);
  i32 errno_ = wasi_random_get((u32)wasi_room, n);
  u32 set = 0;
  for (u32 i = 0; i < sizeof wasi_room; i++) set += wasi_room[i] != 0;
  /* Random bytes are rarely 0: more than half of many are not, and none beyond those asked for. */
  wasi_say(whole, errno_, 1, errno_ == 0 && n > 16 ? set > n / 2 && set <= n : set <= n, (Text){0, 0});
}

static i32 wasi_step(Text verb, Text whole, Text rest) {
  Text none = {0, 0};
  u32 out[8] = {0};
  if (is(verb, "environ")) {
    i32 errno_ = wasi_environ_sizes_get((u32)&out[0], (u32)&out[1]);
    u32 lines[32];
    if (errno_ == 0 && out[0] <= 32 && out[1] <= sizeof wasi_room)
      errno_ = wasi_environ_get((u32)lines, (u32)wasi_room);
    wasi_say(whole, errno_, 1, out[0], (Text){wasi_room, out[1]});
  } else if (is(verb, "args")) {
    i32 errno_ = wasi_args_sizes_get((u32)&out[0], (u32)&out[1]);
    wasi_say(whole, errno_, 1, out[0], none);
  } else if (is(verb, "clock")) {
    u64 now = 0;
    i32 errno_ = wasi_clock_time_get((u32)number(word(&rest)), 1, (u32)&now);
    wasi_say(whole, errno_, 1, now != 0, none);
  } else if (is(verb, "random")) {
    wasi_random(whole, (u32)number(word(&rest)));
  } else if (is(verb, "write")) {
    u32 fd = (u32)number(word(&rest));
    wasi_write(whole, fd, bytes(word(&rest), 0));
  } else if (is(verb, "prestat")) {
    wasi_say(whole, wasi_fd_prestat_get(3, (u32)out), 0, 0, none);
  } else if (is(verb, "fdstat")) {
    wasi_say(whole, wasi_fd_fdstat_get((u32)number(word(&rest)), (u32)out), 0, 0, none);
  } else if (is(verb, "read")) {
    wasi_say(whole, wasi_fd_read(0, (u32)out, 1, (u32)&out[2]), 0, 0, none);
  } else if (is(verb, "open")) {
    Text path = bytes(word(&rest), 0);
    wasi_say(whole, wasi_path_open(3, 0, (u32)path.at, path.len, 0, 0, 0, 0, (u32)out), 0, 0, none);
  } else if (is(verb, "poll")) {
    wasi_say(whole, wasi_poll_oneoff((u32)wasi_room, (u32)wasi_room + 64, 1, (u32)out), 1, out[0], none);
  } else if (is(verb, "yield")) {
    wasi_say(whole, wasi_sched_yield(), 0, 0, none);
  } else if (is(verb, "exit")) {
    wasi_proc_exit((u32)number(word(&rest)));
  } else {
    return 0;
  }
  return 1;
}
